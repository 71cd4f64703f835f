"""The data that the parts of Quartet exchange: dataclasses over NumPy arrays, without torch and protobuf."""
