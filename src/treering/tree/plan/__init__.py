"""Plans what is computed together: packing, cutting, balancing, and their costs."""
