"""What can be known without running a model: `muster inspect`, `roofline` and `backends`."""
