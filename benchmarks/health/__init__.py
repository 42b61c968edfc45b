"""How early the health watch is, and how often wrong."""
