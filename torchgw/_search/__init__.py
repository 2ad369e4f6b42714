"""Where optima are looked for before the outer iteration begins."""
