"""`make image-check`: runs the image with podman as a cluster would run it; docs/image-check.txt has the output.

Not a test of pytest: it needs root or subordinate ids, podman, an image and minutes.
"""
