"""`treering simulate`: scheduling policies compared in virtual time."""
