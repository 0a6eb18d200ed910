"""Tinker's protocol: sessions of clients that train and sample models of their own."""
