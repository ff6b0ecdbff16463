"""The size of the code: files and lines of each folder, and what one training step executes."""
