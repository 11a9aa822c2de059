"""The expert layer: routing, dispatch, backends under one contract, plan."""
