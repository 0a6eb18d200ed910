"""Every road of Treering with a pretrained model, SmolLM2-135M-Instruct."""
