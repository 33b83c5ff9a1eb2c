"""Networks map observations to action distributions and values."""
