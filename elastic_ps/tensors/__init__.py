"""Both ends of `session.server`: tensors that scripts keep on the parameter servers, beside the model."""
