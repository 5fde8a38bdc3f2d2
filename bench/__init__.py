"""Every performance claim of the project, as something that prints it."""
