"""Object stores behind one protocol (``base``): Backblaze B2, S3 and a local directory."""
