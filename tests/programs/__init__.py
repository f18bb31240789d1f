"""Programs under test, and what starts and drives them."""
