"""HTTP servers around engines that bring none, each as thin as it can be, so that the engine is what is measured."""
