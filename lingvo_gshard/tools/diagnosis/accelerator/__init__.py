"""gshard-doctor --accelerator: kernels, exchanges and steps on the devices that are here."""
