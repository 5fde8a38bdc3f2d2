"""The sections of deploy.yaml's `args`, one file for what belongs together; `cluster.config` joins and checks them."""
