"""`antiphon play`: a local page that shows the models of a running server at work.

A small web server on loopback serves the files of `static/` and answers their requests with the asynchronous client.
"""
