"""What is trained here: a task that only reach can answer."""
