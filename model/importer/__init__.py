"""From a checkpoint of another library to a bundle."""
