"""Conversations as token ids and spans: chat templates, plain-role formats, joint tokenisation, collation and masks."""
