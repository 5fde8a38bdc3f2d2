"""What runs where: the schema of deploy.yaml, devices and placement, the application, and the command line."""
