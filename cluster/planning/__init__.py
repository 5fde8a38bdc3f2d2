"""The arithmetic of a deployment before it is built: shapes, hardware, a roofline, and the plan that follows."""
