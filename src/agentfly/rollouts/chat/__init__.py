"""How conversations become token ids."""
