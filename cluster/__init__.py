"""The deployment: the schema of deploy.yaml, devices and placement, the application, and the command line."""
