"""From evidence and times to a plan, and `muster plan`."""
