"""Every process of a run gets its context, its machine, its keys and its end from this package."""
