"""Assembly turns the steps of live agents into finished segments."""
