"""Recipes of Tinker's cookbook on `treering serve --train`."""
