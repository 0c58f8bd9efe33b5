"""The selective scan: one operator, three backends, chosen by where the tensor lives."""
