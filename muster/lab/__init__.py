"""One file per command that builds, proves or measures."""
