"""`session.server`, both ends of it: tensors that scripts keep on the parameter servers, beside the model."""
