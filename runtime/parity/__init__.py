"""The parity table: which layouts train what one process trains, shown by training."""
