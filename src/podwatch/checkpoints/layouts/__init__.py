"""One small file per trainer family, each behind the ``Layout`` protocol of ``base``."""
