"""The daemon: ``main`` is its life on one page, ``build`` makes its parts, ``entry`` is what `podwatch run` calls."""
