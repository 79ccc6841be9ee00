"""Seven operations on the objects of a bucket or a directory: put, get, read, list, delete, check, close."""
