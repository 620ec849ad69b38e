"""Adapters: what lets engines use specpool on pools of their own. Nothing else imports them."""
