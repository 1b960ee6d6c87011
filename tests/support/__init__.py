"""What tests share: bounds on errors, and what they are taken from."""
