"""From operations to launches: rules, and the places of tensors in memory."""
