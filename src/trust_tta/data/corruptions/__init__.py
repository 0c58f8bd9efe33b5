"""The 15 common corruptions of CIFAR-10-C and ImageNet-C and the four held-out ones, at five severities."""
