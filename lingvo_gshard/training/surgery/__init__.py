"""Trained models made into other models: conversion, pruning, upcycling."""
