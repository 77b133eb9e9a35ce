"""`make image-check`: the image as a cluster would run it, run here by podman; docs/IMAGE.md has the output.

Not a test of pytest: it needs root or subordinate ids, podman, an image and minutes.
"""
