"""Object stores behind one protocol (``base``): a local directory and Backblaze B2."""
