"""Model servers as resources."""
