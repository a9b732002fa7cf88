"""Audits: does the code leak more than it claims?"""
