"""What the package makes of 400 problems: written down once, and compared after every change."""
