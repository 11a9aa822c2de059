"""Evidence that stays: its words, its file, what makes it count, its way to other machines, and `muster ledger`."""
