"""The bodies the API takes and gives, as pydantic models: fields and bounds, not how they are carried out."""
