"""The linear problem at a given cost, and the backends that solve it. Knows no geometry."""
