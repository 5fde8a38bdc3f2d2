"""The bundled demo pair: training, measurement and model card."""
