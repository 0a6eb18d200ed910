"""`treering demo`: one small policy trained by a plain loop and by Treering, compared."""
