"""What is asked: from the input of a user to a problem."""
