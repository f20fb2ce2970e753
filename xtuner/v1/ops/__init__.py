"""The operations that the model is made of: one reference and the fast ones behind the same signature."""
