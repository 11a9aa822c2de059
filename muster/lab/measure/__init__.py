"""Times and what they are held against: the timer, floors, measured peaks, and `muster bench`."""
