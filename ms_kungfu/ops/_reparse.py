"""stub"""
def mend_caller(): pass
def refuse(): pass
